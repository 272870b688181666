"""Print the Grafana board of stagescope's /metrics as JSON.

    python3 deploy/grafana/board.py > stagescope.json

It needs only Python. `tests/service/http/test_dashboard.py` checks that the board shows every
published metric.
"""

import json
import sys
from typing import Any

Json = dict[str, Any]

FAILED = ', state=~"failed|missed"'
SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}


def of_run(name: str, more: str = "") -> str:
    """Return the selector of a metric of the chosen runs."""
    return f'stagescope_{name}{{run=~"$run"{more}}}'


def of_step(*metrics: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the targets of (metric of a step, words after the run's name)."""
    return [
        (of_run("step_metric", f', metric="{metric}"'), f"{{{{run}}}} {words}".strip())
        for metric, words in metrics
    ]


def panel(
    kind: str, title: str, description: str, targets: list[tuple[str, str]],
    defaults: Json, options: Json, size: tuple[int, int],
) -> Json:  # fmt: skip
    """Return a panel; `layout` adds its id and position."""
    instant = kind == "stat"
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "targets": [
            {
                "refId": "ABCDEF"[at],
                "datasource": SOURCE,
                "editorMode": "code",
                "expr": expression,
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
            }
            for at, (expression, legend) in enumerate(targets)
        ],
        "fieldConfig": {"defaults": {"mappings": [], **defaults}, "overrides": []},
        "options": options,
        "gridPos": {"w": size[0], "h": size[1]},
    }


def thresholds(below: str, *above: tuple[float, str]) -> Json:
    """Return a colour below all bounds, and the colour from each bound on."""
    steps: list[Json] = [{"color": below, "value": None}]
    steps += [{"color": colour, "value": bound} for bound, colour in above]
    return {"mode": "absolute", "steps": steps}


def stat(title: str, description: str, expression: str, *, bad: bool = False) -> Json:
    """Return a single number, which is red from 1 on where it counts what is `bad`."""
    defaults: Json = {
        "unit": "short",
        "color": {"mode": "thresholds"},
        "thresholds": thresholds("green", *[(1, "red")] * bad),
        "noValue": "none",
    }
    options: Json = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "auto",
    }
    return panel("stat", title, description, [(expression, "__auto")], defaults, options, (4, 4))


def lines(
    title: str, description: str, *targets: tuple[str, str], unit: str = "none",
    zero: bool = True, bound: float | None = None, stacked: bool = False, width: int = 8,
) -> Json:  # fmt: skip
    """Return curves over time.

    Args:
        title, description: of the panel.
        targets: (expression, legend) of each query.
        unit: Grafana's name of the unit.
        zero: whether the axis begins at 0.
        bound: a value at which a red line is drawn.
        stacked: whether curves add up.
        width: in columns of 24.
    """
    defaults: Json = {
        "unit": unit,
        "color": {"mode": "palette-classic"},
        "custom": {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 20 if stacked else 0,
            "showPoints": "auto",
            "spanNulls": False,
            "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "off" if bound is None else "line"},
        },
        "thresholds": thresholds("green", *([] if bound is None else [(bound, "red")])),
        **({"min": 0} if zero else {}),
    }
    options: Json = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel("timeseries", title, description, [*targets], defaults, options, (width, 8))


def states(title: str, description: str, target: tuple[str, str], no: str, yes: str) -> Json:
    """Return a timeline of a metric that is 0 or 1, with the words of both."""
    words = {
        str(at): {"text": text, "color": colour, "index": at}
        for at, (text, colour) in enumerate(((no, "red"), (yes, "green")))
    }
    defaults: Json = {
        "unit": "none",
        "color": {"mode": "thresholds"},
        "custom": {"fillOpacity": 70, "lineWidth": 0},
        "mappings": [{"type": "value", "options": words}],
        "thresholds": thresholds("red", (1, "green")),
    }
    options: Json = {
        "mergeValues": True,
        "showValue": "auto",
        "alignValue": "left",
        "rowHeight": 0.9,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return panel("state-timeline", title, description, [target], defaults, options, (12, 8))


ROWS: dict[str, list[Json]] = {
    "Is anything wrong": [
        stat("Live runs", "Runs of which a process holds its lease.",
             f"sum({of_run('run_live')})"),
        stat("Live processes", "Processes that hold their lease.",
             f"sum({of_run('processes_live')}) or vector(0)"),
        stat("Runs whose step cannot be trusted",
             "Runs whose newest measured step has streams that cannot be compared: suspect, "
             "not measured or unknown.",
             f"count({of_run('step_comparable')} == 0) or vector(0)", bad=True),
        stat("Findings", "Findings of the runs, all kinds.",
             f"sum({of_run('findings')}) or vector(0)"),
        stat("Lost", "Lost data: announced and never arrived, or dropped.",
             f"sum({of_run('lost')}) or vector(0)", bad=True),
        stat("Captures that gathered nothing", "Dumps that failed or were missed.",
             f"sum({of_run('dumps', FAILED)}) or vector(0)", bad=True),
    ],
    "Steps": [
        lines("Steps", "The newest step of each run, and the newest whose numbers are measured.",
              (of_run("run_newest_step"), "{{run}} newest"), (of_run("step"), "{{run}} measured"),
              zero=False),
        lines("Steps behind", "Steps between the newest and the newest measured one.",
              (of_run("run_step_lag"), "{{run}}")),
        lines("Open steps and attempts",
              "Steps that are not closed: a rank has not begun a later one. A new attempt is a "
              "restart of the training.",
              (of_run("steps_open"), "{{run}} open steps"),
              (of_run("attempts"), "{{run}} attempts")),
        lines("Live processes by role", "Processes that hold their lease.",
              (of_run("processes_live"), "{{run}} {{role}}")),
        lines("Open stages",
              "Stages that were begun and not ended; one that stays is where a run waits.",
              (of_run("stages_open"), "{{run}} {{stage}}")),
        lines("Silence", "Time since a process of the run was heard.",
              (of_run("run_silent_seconds"), "{{run}}"), unit="s"),
    ],
    "Rollout against training, of the newest measured step": [
        lines("Worst round",
              "Mean |d| of the worst round; d is the trainer's log-prob minus the rollout's. The "
              "line is the default rule's bound.",
              *of_step(("per_round/max_diff_value", "")), bound=0.05),
        lines("k3_kl and kl",
              "rollout_corr/k3_kl (never below 0) and rollout_corr/kl (k1, may be), in nats.",
              *of_step(("rollout_corr/k3_kl", "k3_kl"), ("rollout_corr/kl", "kl")), zero=False),
        lines("Difference of probabilities",
              "training/rollout_probs_diff_mean and _std, of |e^p - e^q|. The line is verl's "
              "bound of the mean.",
              *of_step(("training/rollout_probs_diff_mean", "mean"),
                       ("training/rollout_probs_diff_std", "std")), bound=0.01),
        lines("Correlation",
              "training/rollout_actor_probs_pearson_corr; the default rule fires below 0.9.",
              *of_step(("training/rollout_actor_probs_pearson_corr", "")), zero=False),
        lines("Calibration",
              "z-score of the mean ratio p/q against 1, where the rollout's stream is what was "
              "sampled: beyond 4 or so, truncation, temperature or another adapter.",
              *of_step(("calibration/z", "")), zero=False),
        lines("Further means",
              "train_rollout_logprob_abs_diff (slime), token_mult_prob_error (NeMo-RL, alarm at "
              "1.05), ppl_ratio.",
              *of_step(("train_rollout_logprob_abs_diff", "abs diff"),
                       ("token_mult_prob_error", "mult error"),
                       ("rollout_corr/ppl_ratio", "ppl ratio")), zero=False),
        states("Verdict on the streams",
               "Whether the step's two streams can be compared, with the cause where they cannot.",
               (of_run("step_comparable"), "{{run}}: {{verdict}} {{cause}}"),
               "not to be trusted", "comparable"),
        lines("Rounds", "Rounds of the step, and the index of the worst one.",
              *of_step(("per_round/total_rounds", "rounds"),
                       ("per_round/max_round_diff", "worst round")), width=12),
    ],
    "Findings, captures, lost data": [
        lines("Findings by kind", "Findings of the runs; `stagescope findings` has them in full.",
              (f"sum by (kind) ({of_run('findings')})", "{{kind}}"), stacked=True),
        lines("Captures by state",
              "Dumps of captures: armed, complete, truncated, failed, missed, skipped.",
              (f"sum by (state) ({of_run('dumps')})", "{{state}}"), stacked=True),
        lines("Lost by kind",
              "Lost data: announced and never arrived, or dropped. `stagescope lost` says why.",
              (f"sum by (run, kind) ({of_run('lost')})", "{{run}} {{kind}}")),
    ],
    "The service": [
        lines("Payloads on their way",
              "Payloads that were announced and are not yet settled: the lag of the intake.",
              (of_run("payloads_announced"), "{{run}}"), stacked=True, width=6),
        lines("Bytes on their way", "Bytes of these payloads.",
              (of_run("payload_bytes_announced"), "{{run}}"),
              unit="bytes", stacked=True, width=6),
        lines("Catalogue", "Bytes of the catalogue's files.",
              ("stagescope_catalogue_bytes", "{{instance}}"), unit="bytes", width=6),
        lines("Age of the counts",
              "The service counts at each scrape. Where counting takes long, it answers with its "
              "last counts: this is their age.",
              ("stagescope_counts_age_seconds", "{{instance}}"), unit="s", width=6),
        lines("Tensors on disk", "Bytes of the kept files and of the ring, of all nodes.",
              (f"sum by (kind) ({of_run('file_bytes')})", "{{kind}}"),
              unit="bytes", stacked=True, width=12),
        states("Completeness of the newest closed step",
               "Whether all that was expected of it arrived; which state it has instead is in its "
               "label.",
               (of_run("step_complete"), "{{run}}: {{completeness}}"), "not complete", "complete"),
    ],
}  # fmt: skip


def layout(rows: dict[str, list[Json]]) -> list[Json]:
    """Return all panels with ids and positions: each row from left to right, 24 columns wide."""
    placed: list[Json] = []
    y = 0
    for title, panels in rows.items():
        row = {"type": "row", "title": title, "collapsed": False, "panels": []}
        placed.append({**row, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
        x, y, height = 0, y + 1, 0
        for each in panels:
            size = each["gridPos"]
            if x + size["w"] > 24:
                x, y = 0, y + height
            placed.append({**each, "gridPos": {**size, "x": x, "y": y}})
            x, height = x + size["w"], size["h"]
        y += height
    return [{"id": at, **each} for at, each in enumerate(placed, 1)]


def board() -> Json:
    """Return the board."""
    runs = "label_values(stagescope_run_live, run)"
    hidden: Json = {"hide": 0, "options": [], "regex": "", "skipUrlSync": False}
    return {
        "annotations": {
            "list": [
                {
                    "builtIn": 1, "datasource": {"type": "grafana", "uid": "-- Grafana --"},
                    "enable": True, "hide": True, "iconColor": "rgba(0, 211, 255, 1)",
                    "name": "Annotations & Alerts", "type": "dashboard",
                },
                {
                    "datasource": SOURCE, "enable": True, "hide": False, "iconColor": "orange",
                    "name": "New attempts",
                    "expr": f"changes({of_run('run_attempt')}[1m]) > 0",
                    "titleFormat": "new attempt of {{run}}", "step": "60s",
                },
            ]
        },
        "description": "Rollout/training mismatch, progress, findings and lost data of RL "
        "post-training runs, from stagescope's /metrics.",
        "editable": True, "fiscalYearStartMonth": 0, "graphTooltip": 1, "id": None, "links": [],
        "panels": layout(ROWS),
        "refresh": "30s", "schemaVersion": 39, "tags": ["stagescope", "rl"],
        "templating": {
            "list": [
                {
                    "name": "datasource", "label": "Data source", "type": "datasource",
                    "query": "prometheus", "current": {}, "includeAll": False, "multi": False,
                    "refresh": 1, **hidden,
                },
                {
                    "name": "run", "label": "Run", "type": "query", "datasource": SOURCE,
                    "definition": runs, "query": {"query": runs, "refId": "run"},
                    "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
                    "includeAll": True, "multi": True, "refresh": 2, "sort": 1, **hidden,
                },
            ]
        },
        "time": {"from": "now-6h", "to": "now"}, "timepicker": {}, "timezone": "",
        "title": "stagescope", "uid": "stagescope", "version": 1, "weekStart": "",
    }  # fmt: skip


if __name__ == "__main__":
    json.dump(board(), sys.stdout, indent=1)
    sys.stdout.write("\n")
