"""What `dumpstatus` advises about a changefeed that does not run."""

from dataclasses import replace

import pytest

from server.changefeed import keys
from server.changefeed.info import ChangefeedInfo, RunningError, State
from server.dump.service import DumpScope

INFO = ChangefeedInfo(
    id="feed", sink_uri="delta:///lake", start_ts=1, target_ts=0, create_time="now", rules=("a.*",)
)
REFUSED = RunningError(
    "ErrDdlUnsupported", "at 9 a.t: Create another changefeed with --start-ts 9", "now"
)


@pytest.mark.parametrize(
    ("state", "error", "advice"),
    [
        (
            State.STOPPED,
            None,
            "the changefeed is stopped; `tidemark cli changefeed resume -c feed` lets it go on",
        ),
        (State.FINISHED, None, "the changefeed is finished"),
    ],
)
async def test_a_resume_is_advised_only_where_it_is_all_that_is_missing(meta, state, error, advice):
    await meta.put(keys.info("feed"), replace(INFO, state=state, error=error).to_json())
    assert (await DumpScope.of(meta, "feed")).stopped_by == advice


async def test_of_a_failure_its_own_advice_comes_first(meta):
    await meta.put(keys.info("feed"), replace(INFO, state=State.FAILED, error=REFUSED).to_json())
    stands = (await DumpScope.of(meta, "feed")).stopped_by
    assert (
        stands.index("--start-ts 9")
        < stands.index("where its cause is gone")
        < stands.index("resume -c feed")
    )
