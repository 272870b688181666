"""Prompts with images: a real multimodal model on the one side, OpenAI's chat on the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.answering import serving
from tests.support.command_line import invoke
from tests.support.engines.servers import EngineServer

from stagescope import cli
from stagescope_wire.engines import Sampling
from stagescope_wire.errors import InvalidInput
from stagescope_workers.consistency.command import consistency
from stagescope_workers.consistency.transformers_engine import TransformersEngine

pytest.importorskip("transformers")
image_library = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.engines.tiny_llava import write_llava

    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of two images, as CLEVR's: how many are there?"""
    folder = tmp_path_factory.mktemp("data")
    rows = []
    for name, colour in (("red", (200, 10, 10)), ("blue", (10, 10, 220))):
        image_library.new("RGB", (40, 30), colour).save(folder / f"{name}.png")
        rows.append({"prompt": "how many?", "answer": "1", "image": f"{name}.png", "id": name})
    path = folder / "clevr.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def message(folder: Path, name: str) -> list[dict[str, object]]:
    image = {"type": "image", "path": str(folder / f"{name}.png")}
    return [{"role": "user", "content": [image, {"type": "text", "text": "how many?"}]}]


def test_the_model_sees_the_image(llava: Path, data: Path) -> None:
    engine = TransformersEngine(llava)
    assert engine.info.multimodal is True
    drawn = Sampling(max_tokens=8)
    conversations = [message(data.parent, name) for name in ("red", "blue", "red")]
    red, blue, again = engine.chat(conversations, drawn)
    assert red == again
    assert red.log_probs != blue.log_probs
    assert len(red.token_ids or ()) == len(red.log_probs)
    [text] = engine.generate(["how many?"], drawn)  # and it answers texts, too
    assert text.token_ids is not None
    row = engine.tokenizer("how many?")["input_ids"]
    [scored] = engine.score([[*row, *text.token_ids]])
    assert scored[len(row) :] == pytest.approx(text.log_probs, abs=1e-4)


def test_a_model_of_texts_takes_none(model: Path, data: Path) -> None:
    with pytest.raises(InvalidInput, match="no part that sees images"):
        TransformersEngine(model).chat([message(data.parent, "red")])


def test_a_data_set_with_images(
    llava: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.main.commands, "consistency", consistency)
    monkeypatch.delenv("STAGESCOPE_URL", raising=False)
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path / "home"))
    server = EngineServer("sglang")  # it says that it has no image understanding
    with serving(server.app) as url:
        words = ("--model", llava, "--engine", url, "--dataset", data, "--max-tokens", "8")
        found = invoke("consistency", *map(str, words), "--json")
    assert found.exit_code == 0, found.output
    reported = json.loads(found.stdout)
    assert "--enable-multimodal" in reported["warnings"][0]
    assert [row["engine"] for row in reported["answers"]["rows"]] == ["1 images"] * 2
    assert reported["answers"]["engine_right"] == 2
    sent = [body for path, body in server.asked if path == "/v1/chat/completions"]
    assert len(sent) == 2
    assert all(
        body["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
        for body in sent
    )
