"""From the logs of many ranks, the error that explains the failure."""

import pytest

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.verification.failure import LINES, excerpt

SUMMARY = """\
W1129 14:00:00.000000 10 torch/distributed/elastic/multiprocessing/api.py:1] Sending SIGTERM
============================================================
megatron_cp_ext.run FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-11-29_14:00:00
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : {exitcode} (pid: 11)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org
============================================================
"""
ERROR = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
ValueError: {text}
"""


@pytest.fixture
def logs(tmp_path):
    def write(launcher, *ranks):
        (tmp_path / "launcher.log").write_text(launcher)
        for rank, text in enumerate(ranks):
            folder = tmp_path / "ranks" / "none_x" / "attempt_0" / str(rank)
            folder.mkdir(parents=True)
            (folder / "stderr.log").write_text(text)
            (folder / "stdout.log").write_text("iteration 1")
        return excerpt(tmp_path / "launcher.log", tmp_path / "ranks")

    return write


def test_the_rank_that_failed_first_is_shown(logs):
    text = logs(
        SUMMARY.format(rank=1, exitcode=1), ERROR.format(text="late"), ERROR.format(text="first")
    )
    assert text.splitlines()[0] == "rank 1:"
    assert text.splitlines()[-1] == "ValueError: first"


def test_a_rank_that_only_lost_its_peer_is_not_the_one(logs):
    text = logs(
        SUMMARY.format(rank=0, exitcode=1),
        ERROR.format(text="Connection closed by peer [127.0.0.1]:1"),
        ERROR.format(text="the cause"),
    )
    assert text.splitlines()[0] == "rank 1:"
    assert text.splitlines()[-1] == "ValueError: the cause"


def test_rank_prefixes_and_warnings_of_torch_are_left_out(logs):
    prefixed = "".join(f"[rank0]: {line}\n" for line in ERROR.format(text="x").splitlines())
    noise = (
        "[rank0]:[W1129 14:00:00.123456789 ProcessGroup.cpp:1] Warning: destroy it \n"
        "[W1129 14:00:00.123456789 socket.cpp:1] Warning: slow \n"
    )
    assert logs(SUMMARY.format(rank=0, exitcode=1), noise + prefixed + noise).splitlines() == [
        "rank 0:",
        *ERROR.format(text="x").splitlines(),
    ]


def test_of_several_tracebacks_the_last_is_shown(logs):
    chained = ERROR.format(text="inner") + "During handling, another exception:\n"
    text = logs(SUMMARY.format(rank=0, exitcode=1), chained + ERROR.format(text="outer"))
    assert "inner" not in text
    assert text.endswith("ValueError: outer")


def test_a_long_traceback_keeps_its_first_line_and_its_end(logs):
    frames = "".join(f'  File "f{i}.py", line 1, in f\n' for i in range(200))
    text = logs(
        SUMMARY.format(rank=0, exitcode=1),
        f"Traceback (most recent call last):\n{frames}ValueError: deep\n",
    )
    lines = text.splitlines()
    assert len(lines) == LINES + 2
    assert lines[1].startswith("Traceback")
    assert lines[2] == f"... {202 - LINES} lines ..."
    assert lines[-1] == "ValueError: deep"


def test_a_killed_rank_is_named_with_its_signal(logs):
    text = logs(SUMMARY.format(rank=1, exitcode=-9), "", "loading\n")
    assert text.splitlines() == ["rank 1 was killed by signal 9", "loading"]


def test_an_error_without_traceback_shows_the_end_of_the_log_without_warnings(logs):
    warnings = (
        "lib/optimizer.py:25: UserWarning: slower than it could be\n  warnings.warn(\n"
        "lib/allocator.py:42: SyntaxWarning: invalid escape sequence\n"
    )
    text = logs(SUMMARY.format(rank=0, exitcode=2), warnings + "loading\nno space left\n")
    assert text.splitlines() == ["rank 0:", "loading", "no space left"]


def test_an_unknown_option_is_shown_without_the_list_of_all_options(logs):
    usage = "usage: x\n" + "  [--option OPTION]\n" * 600
    text = logs(SUMMARY.format(rank=0, exitcode=2), usage + "x.py: error: unknown option --y\n")
    assert text.splitlines() == ["rank 0:", "x.py: error: unknown option --y"]


def test_a_users_mistake_is_shown_without_its_traceback(logs):
    error = UsageError(option="--cp", value=3, reason="odd", remedy="an even number")
    stderr = (
        "Traceback (most recent call last):\n"
        '  File "session.py", line 1, in validate\n'
        f"megatron_cp_ext.errors.UsageError: {error}\n"
    )
    assert logs(SUMMARY.format(rank=0, exitcode=1), stderr).splitlines() == [
        "rank 0:",
        "megatron_cp_ext.errors.UsageError: ",
        "  option: --cp",
        "  value:  3",
        "  reason: odd",
        "  remedy: an even number",
    ]


def test_without_rank_logs_the_launchers_own_error_is_shown(logs):
    assert logs("hello\n" + ERROR.format(text="no port")).splitlines()[-1] == "ValueError: no port"


def test_without_any_log_there_is_nothing_to_show(tmp_path):
    assert excerpt(tmp_path / "launcher.log", tmp_path / "ranks") == ""
