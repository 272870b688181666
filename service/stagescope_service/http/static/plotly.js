// Loads Plotly, which is as large as all else together.

let loading = null;

/** Load it, once; it is a script, and no module. */
export function plotly() {
  loading ??= new Promise((done, fail) => {
    const script = document.createElement("script");
    script.src = new URL("plotly-cartesian.min.js", import.meta.url).href;
    script.onload = () => done(window.Plotly);
    script.onerror = () => { loading = null; fail(new Error("plotly-cartesian.min.js could not be loaded")); };
    document.head.append(script);
  });
  return loading;
}

/**
 * Let the browser fetch it and not read it, which takes long.
 * @param rel "preload": it is needed soon; "prefetch": once nothing else is to be done.
 */
export function fetchPlotly(rel) {
  if (loading) return;
  const link = document.createElement("link");
  Object.assign(link, { rel, as: "script", href: new URL("plotly-cartesian.min.js", import.meta.url).href });
  document.head.append(link);
}
