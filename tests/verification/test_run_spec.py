"""A SPEC says exactly one thing, and says it to Megatron."""

import pytest

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.verification.spec import RunSpec, refuse_decided


def flag(arguments, name):
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("ring", "megatron_cp_algo"),
        ("ulysses", "ulysses_cp_algo"),
        ("kvallgather", "kvallgather_cp_algo"),
    ],
)
def test_both_names_of_an_algorithm_mean_the_same(short, long):
    spec = RunSpec.parse(f"{short}:cp=2")
    assert spec == RunSpec.parse(f"{long}:cp=2")
    assert flag(spec.arguments(), "--context-parallel-algo") == long
    assert flag(spec.arguments(), "--context-parallel-size") == "2"
    assert spec.world_size == 2


def test_hybrid_passes_its_ulysses_degree():
    spec = RunSpec.parse("hybrid:cp=4,ulysses=2")
    assert flag(spec.arguments(), "--context-parallel-algo") == "hybrid_cp_algo"
    assert flag(spec.arguments(), "--ulysses-degree-in-cp") == "2"


def test_degrees_multiply_to_the_number_of_ranks_and_reach_megatron():
    spec = RunSpec.parse("ring:cp=2,tp=2,pp=3,dp=5,sp")
    assert spec.world_size == 60
    assert flag(spec.arguments(), "--tensor-model-parallel-size") == "2"
    assert flag(spec.arguments(), "--pipeline-model-parallel-size") == "3"
    assert "--sequence-parallel" in spec.arguments()


def test_other_keys_and_flags_are_megatron_options_of_this_run():
    spec = RunSpec.parse("ring:cp=2,recompute_granularity=full,moe-layer-freq=1 0,no-rope-fusion")
    assert spec.options == (
        *("--recompute-granularity", "full"),
        *("--moe-layer-freq", "1", "0"),
        "--no-rope-fusion",
    )
    assert spec.arguments()[-6:] == list(spec.options)


@pytest.mark.parametrize(
    "text",
    [
        "ring:cp=2",
        "hybrid:cp=4,ulysses=2,tp=2,sp",
        "kvallgather:cp=2,pp=2,dp=2,recompute-granularity=full,moe-layer-freq=1 0,swiglu",
        "none",
        "none:tp=2",
    ],
)
def test_a_spec_prints_as_it_is_written(text):
    assert str(RunSpec.parse(text)) == text


def test_no_algorithm_means_megatrons_own_attention():
    spec = RunSpec.parse("none:dp=2")
    assert spec.world_size == 2
    assert "--context-parallel-algo" not in spec.arguments()


def test_the_baseline_keeps_tp_and_pp_and_drops_everything_else():
    spec = RunSpec.parse("ring:cp=2,tp=2,pp=2,dp=2,sp,swiglu")
    assert spec.baseline() == RunSpec("none", tp=2, pp=2)


@pytest.mark.parametrize(
    ("text", "reason", "remedy"),
    [
        ("rings:cp=2", "unknown algorithm 'rings'", "ring, ulysses"),
        ("", "unknown algorithm", "ring"),
        ("ring", "context-parallel size is missing", "ring:cp=2"),
        ("ring:tp=2", "context-parallel size is missing", "ring:cp=2"),
        ("none:cp=2", "without an algorithm", "ring"),
        ("ring:cp=two", "whole number", "cp=2"),
        ("ring:cp=0", "whole number", "cp=2"),
        ("ring:cp", "whole number", "cp=2"),
        ("ring:cp=2,cp=4", "given twice", "once"),
        ("ring:cp=2,=3", "neither key=value nor a flag", "tp=2"),
        ("ring:cp=2,lr=", "neither key=value nor a flag", "tp=2"),
        ("ring:cp=2,sp", "needs tensor parallelism", "tp=2"),
        ("ring:cp=2,tp=2,sp=1", "takes no value", "sp alone"),
        ("hybrid:cp=4", "needs its Ulysses degree", "ulysses=2"),
        ("hybrid:cp=4,ulysses=3", "does not divide", "1, 2, 4"),
        ("ring:cp=4,ulysses=2", "no Ulysses degree", "hybrid"),
        ("ring:cp=2,context-parallel-size=4", "not a spec's own key", "cp=N"),
        ("ring:cp=2,train_iters=4", "not a spec's own key", "--steps"),
    ],
)
def test_a_wrong_spec_is_refused_with_reason_and_remedy(text, reason, remedy):
    with pytest.raises(UsageError) as caught:
        RunSpec.parse(text, option="--baseline")
    error = caught.value
    assert (error.option, error.value) == ("--baseline", text)
    assert reason in error.reason
    assert remedy in error.remedy


@pytest.mark.parametrize("argument", ["--seq-length", "--seq_length", "--bf16", "--train-iters=9"])
def test_what_verify_sets_cannot_be_set_for_all_runs_either(argument):
    with pytest.raises(UsageError, match="use verify's"):
        refuse_decided(["--num-layers", "4", argument])


def test_other_arguments_for_all_runs_are_free():
    refuse_decided(["--num-layers", "4", "--seed", "7", "seq-length"])
