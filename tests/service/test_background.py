"""Background tasks: each is kept until it ends, and what it raises is in the log at once."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
from pathlib import Path

import pytest

import stagescope_service
from stagescope_service.background import BackgroundTasks


async def fail() -> None:
    raise KeyError("the reason")


def test_what_a_task_raises_is_logged_and_not_left_to_asyncio(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        tasks = BackgroundTasks()
        task = tasks.start(fail())
        await asyncio.wait([task])
        assert len(tasks) == 0

    asyncio.run(work())
    gc.collect()  # here asyncio would say "never retrieved"
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("stagescope_service.background", logging.ERROR)
    assert record.getMessage() == "the background task fail failed"
    assert record.exc_info is not None
    assert "the reason" in str(record.exc_info[1])


def test_a_task_that_nobody_else_knows_lives_until_its_end() -> None:
    async def work() -> None:
        tasks, ended = BackgroundTasks(), asyncio.Event()

        async def wait() -> None:
            await asyncio.get_running_loop().create_future()  # nothing refers to it but its task

        task = tasks.start(wait())
        task.add_done_callback(lambda _: ended.set())
        del task
        await asyncio.sleep(0)
        gc.collect()
        assert len(tasks) == 1
        assert not ended.is_set()

    asyncio.run(work())


def test_no_other_file_of_the_service_starts_a_task() -> None:
    root = Path(stagescope_service.__file__).parent
    starting = re.compile(r"create_task\(|ensure_future\(")
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if starting.search(path.read_text())
    }
    assert found == {"background.py"}
