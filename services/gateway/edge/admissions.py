"""How many calls of each RPC run at a time."""

from services.platform.rpc.admission import Admission

# With these medians most answers take less than a tenth of a second.
QUICK_S, QUICK_WRITE_S, QUICK_SEARCH_S = 0.04, 0.05, 0.1


def admissions() -> dict[str, Admission]:
    """Return each RPC's limit: reads and writes have measured ones."""
    # Two reads at a time are some 200 a second.
    reads = Admission("recommendations", smallest=2, largest=512, surplus=32, quick_s=QUICK_S)
    # A write mostly waits for Kafka: many at once, after a short stall of the machine, are no overload.
    writes = Admission("writes", smallest=128, largest=2048, smallest_yielding=2, quick_s=QUICK_WRITE_S)
    streams = Admission("streams", smallest=128, largest=128, per_caller=64)
    rest = Admission("administration", smallest=32, largest=32)
    return {
        "Recommend": reads,
        # A search has no cheaper answer: 32 wait (60 ms of work on two cores) before one is refused.
        "Search": Admission("searches", smallest=4, largest=128, queue=32, quick_s=QUICK_SEARCH_S),
        "RecordInteractions": writes,
        "RecordImpressions": writes,
        "UndoInteraction": writes,
        "StreamInteractions": streams,
        "TailInteractions": Admission("tails", smallest=8, largest=8, per_caller=4),
        **dict.fromkeys(
            (
                *("Similar", "Explain", "GetFreshness", "GetVersionSets", "PutItems", "ForgetUser"),
                *("DescribeCatalogue", "GetItem", "ListItems", "GetUser", "GetHealth"),
                *("ListDeadLetters", "ReplayDeadLetter", "ListRules", "PutRules", "ChangeVersionSet"),
                *("ListExperiments", "ChangeExperiment"),
                *("ListExposures", "GetExposure"),
            ),
            rest,
        ),
    }
