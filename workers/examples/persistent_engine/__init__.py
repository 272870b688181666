"""A long-lived engine for the rollouts, and training from what was kept with no engine at all.

::

    stagescope engines add http://HOST:PORT --name llm
    python -m examples.persistent_engine.generate --model DIR --engine llm --output batch.safetensors
    python -m examples.persistent_engine.train --model DIR --batch batch.safetensors

The first two lines are done once; the last one again and again, on a CPU, under a debugger.
"""  # noqa: E501
