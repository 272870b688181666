"""p against q: the cloud of the kept tensors, and what is drawn without them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.api import Rank, Service, service
from tests.support.batches import bfloat16
from tests.support.runs.drawn import LOG_PROB, UNMEASURED, layout_of, rounds_payload, streams

from stagescope_service.figure_style import traces
from stagescope_service.figures import density
from stagescope_service.figures.density import DensityInfo
from stagescope_service.views.reading.dependencies import Dependencies


@pytest.fixture(scope="module")
def found(deps: Dependencies) -> DensityInfo:
    return density.info(deps, deps.finder.step("r", None, 7))


def test_moments_are_those_of_the_tokens(found: DensityInfo) -> None:
    tokens = streams(7, 2)
    p, q = tokens.p, tokens.q
    assert (found.pair, found.tokens) == (("old", "rollout"), len(p))
    moments = found.moments
    assert moments is not None
    assert moments.p_mean == pytest.approx(float(p.mean()))
    assert moments.q_std == pytest.approx(float(q.std(ddof=1)))
    assert moments.correlation == pytest.approx(float(np.corrcoef(p, q)[0, 1]))
    assert moments.slope == pytest.approx(float(np.polyfit(q, p, 1)[0]))


def test_the_cloud_counts_every_token_of_every_rank_once(found: DensityInfo) -> None:
    tokens = streams(7, 2)
    cloud = found.cloud
    assert cloud is not None
    counts = np.array(cloud.counts)
    assert cloud.tokens == counts.sum() == len(tokens.p)
    assert cloud.outside == 0
    edges = np.array(cloud.edges)
    assert (edges[0], edges[-1]) == (found.low, found.high)
    for p, q in zip(tokens.p[:200], tokens.q[:200], strict=True):
        row, column = (int(np.searchsorted(edges, value, "right")) - 1 for value in (p, q))
        assert counts[row, column] > 0
    low = tokens.p < edges[48]
    assert counts[:48].sum() == int(low.sum())


def test_the_worst_tokens_are_the_worst(found: DensityInfo) -> None:
    tokens = streams(7, 2)
    largest = np.sort(tokens.distance)[::-1][: len(found.worst)]
    assert [abs(token.p - token.q) for token in found.worst] == pytest.approx(largest.tolist())


def test_the_verdict_and_its_reason_are_drawn(deps: Dependencies) -> None:
    found = density.info(deps, deps.finder.step("r", None, 7))
    assert found.comparable == "suspect"
    assert "policy versions" in (found.reason or "")
    drawn = density.figure(found)
    (text,) = (each.text for each in layout_of(drawn).annotations)
    assert text.startswith("<b>suspect</b><br>")
    assert layout_of(drawn).xaxis.title.text == "rollout (q), nat"
    assert layout_of(drawn).yaxis.title.text == "old (p), nat"
    names = [trace.name for trace in traces(drawn)]
    assert "p = q" in names
    assert found.moments is not None
    assert f"regression, slope {found.moments.slope:.3f}" in names


def test_the_unit_of_the_colours_is_named_once(deps: Dependencies) -> None:
    """Beside the bar of a narrow figure there is no room for a long last label."""
    drawn = density.figure(density.info(deps, deps.finder.step("r", None, 7)))
    texts = next(each for each in traces(drawn) if each.type == "heatmap").colorbar.ticktext
    assert list(texts[:2]) == ["1 token", "10"]
    assert all(text.isdigit() for text in texts[1:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scaled_stream_shows_its_slope(
    tmp_path_factory: pytest.TempPathFactory, dtype: str
) -> None:
    with service(tmp_path_factory.mktemp("home")) as running:
        running.engine.keep("old_log_probs", "rollout_log_probs", "response_mask")
        payload = rounds_payload(8, 2, 64, seed=3, noise=0.0)
        shape = payload["tensors"]["rollout_log_probs"][1]
        p = payload["tensors"]["rollout_log_probs"][2] * np.float32(0.8)
        stored: npt.NDArray[np.generic] = bfloat16(p) if dtype == "bfloat16" else p
        payload["tensors"]["old_log_probs"] = (dtype, shape, stored, None)
        Rank(running, world_size=1).stage(LOG_PROB, 1, payload)
        deps = running.app.state.deps
        found = density.info(deps, deps.finder.step("r", None, 1))
        assert found.moments is not None
        assert found.moments.slope == pytest.approx(0.8, abs=0.01)
        assert found.comparable == "suspect"
        assert found.cloud is not None
        assert found.cloud.tokens == found.tokens


def test_without_the_tensors_ellipse_and_worst_tokens_remain(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with service(tmp_path_factory.mktemp("home")) as running:
        Rank(running, world_size=1).stage(LOG_PROB, 1, rounds_payload(4, 2, 32, seed=1))
        answer = running.get("/figures/density", step=1)
        assert "the tensors of this step are gone" in answer["note"]
        names = [trace["name"] for trace in answer["figure"]["data"]]
        assert "two standard deviations" in names
        assert "worst tokens" in names
        assert not [trace for trace in answer["figure"]["data"] if trace["type"] == "heatmap"]


def test_without_numbers_axes_and_the_reason(trained: Service, deps: Dependencies) -> None:
    found = density.info(deps, deps.finder.step("r", None, UNMEASURED))
    assert (found.tokens, found.cloud, found.moments) == (0, None, None)
    drawn = density.figure(found)
    assert len(traces(drawn)) == 0
    assert "both streams" in layout_of(drawn).annotations[0].text.replace("<br>", " ")
