"""How far a capture has come, over HTTP."""

from __future__ import annotations

from tests.support.api import Rank, Service

from stagescope_service.engine.orders.agreement import AGREED

STAGE = "actor_update"


def test_a_step_that_an_earlier_attempt_captured_is_not_waited_for(live: Service) -> None:
    live.operate.post("/captures", json={"run": "r", "stages": [STAGE], "steps": [3, 7]})
    [entry] = live.engine.in_force.entries.values()
    assert entry.agreement.phase == AGREED  # nobody trains yet
    rank = Rank(live, world_size=1)
    for step in (3, 4):
        rank.begin(STAGE, step)
    rank.say("dump", stage=STAGE, step=3, capture_id=entry.capture_id, state="complete", path="/d")
    resumed = Rank(live, key="again", world_size=1, resumed_from_step=5)
    resumed.begin(STAGE, 6)
    said = live.get(f"/captures/{entry.capture_id}")
    assert [(each["attempt"], each["step"], each["state"]) for each in said["steps"]] == [
        (1, 3, "complete"),
        (2, 7, "waiting"),
    ]
