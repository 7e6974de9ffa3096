"""`megatron-cp doctor`: what is installed, what works, and whether every patch fits."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

DESCRIPTION = """\
Shows versions, kernels and why some cannot be used, looks up every object of Megatron that the
plugin patches, and computes attention on two gloo ranks against a whole-sequence reference. One
screen, to be copied into a report. Exit status: 0 if everything needed works, 1 if not."""


def main(argv: Sequence[str]) -> int:
    """Examine this installation; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="megatron-cp doctor",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--no-self-test", action="store_true", help="leave out the two gloo ranks")
    args = parser.parse_args(list(argv))

    with warnings.catch_warnings():
        # Megatron warns of every package that only a cluster has.
        warnings.simplefilter("ignore")
        from megatron_cp_ext.features.diagnosis import diagnose

    findings = diagnose(self_test=not args.no_self_test)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.mark:4} {finding.what:{width}}  {finding.found}")
    broken = [finding.what for finding in findings if finding.broken]
    print(f"broken: {', '.join(broken)}" if broken else "everything needed works")
    return int(bool(broken))
