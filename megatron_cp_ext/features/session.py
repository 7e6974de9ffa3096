"""Runs the features' hooks around Megatron's argument parsing and validation."""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Callable
from typing import Any

from megatron_cp_ext.errors import UsageError, flatten, raise_all
from megatron_cp_ext.features.registry import all_features
from megatron_cp_ext.megatron.releases import (
    TESTED_VERSIONS,
    describe_version,
    installed_version,
)
from megatron_cp_ext.patching import Feature, PatchManager
from megatron_cp_ext.patching.patch import wrap

ARGUMENTS = "megatron.training.arguments"


class Session:
    """The features of one process and the patches they have put in place.

    Args:
        features: the features, in the order their hooks run.
    """

    def __init__(self, features: list[Feature]) -> None:
        self.features = features
        self.manager = PatchManager()
        self._decided = False

    def install(self) -> None:
        """Wrap Megatron's argument parsing and validation, and nothing else."""
        for feature in self.features:
            feature.before_import()
        self.manager.version = describe_version(installed_version())
        self._wrap_arguments()

    def _wrap_arguments(self) -> None:
        register = functools.partial(wrap, owner="adaptor")
        self.manager.register(
            register(
                f"{ARGUMENTS}:parse_args",
                self._parse_args,
                parameters=("extra_args_provider", "ignore_unknown_args"),
            )
        )
        self.manager.register(
            register(
                f"{ARGUMENTS}:validate_args", self._validate_args, parameters=("args", "defaults")
            )
        )
        self.manager.register(
            register(
                "megatron.training.yaml_arguments:validate_yaml",
                self._validate_args,
                parameters=("args", "defaults"),
            )
        )
        self.manager.apply()

    def _parse_args(
        self,
        original: Callable[..., argparse.Namespace],
        extra_args_provider: Callable[[Any], Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> argparse.Namespace:
        ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)

        def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            for feature in self.features:
                feature.register_args(parser)
                feature.register_args(ours)
            return parser

        parsed = original(provider, *args, **kwargs)
        if parsed.rank == 0:
            _warn_when_untested(installed_version())
        # --yaml-cfg throws the parsed options away; ours come back at their defaults.
        for name, default in vars(ours.parse_args([])).items():
            if not hasattr(parsed, name):
                setattr(parsed, name, default)
        return parsed

    def _validate_args(
        self,
        original: Callable[..., Any],
        args: argparse.Namespace,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        if self._decided:
            # What was patched for the arguments validated before may be wrong for these.
            self.manager.undo()
            self._wrap_arguments()
        self._decided = True
        self._run_all("pre_validate_args", args)
        for feature in self.features:
            feature.register_early_patches(self.manager, args)
        self.manager.apply()

        # validate_yaml answers with a namespace of its own, in which the groups are merged.
        args = original(args, *rest, **kwargs)

        self._run_all("validate_args", args)
        self._run_all("post_validate_args", args)
        for feature in self.features:
            feature.register_patches(self.manager, args)
        self.manager.apply()
        return args

    def _run_all(self, hook: str, args: argparse.Namespace) -> None:
        """Run a hook of every feature, and report all the mistakes they find together."""
        errors: list[UsageError] = []
        for feature in self.features:
            try:
                getattr(feature, hook)(args)
            except UsageError as error:
                errors.extend(flatten(error))
        raise_all(errors)


def _warn_when_untested(version: str) -> None:
    """Say that nobody has tried this Megatron; what does not fit fails when it is patched."""
    if version not in TESTED_VERSIONS:
        warnings.warn(
            f"megatron_cp_ext is tested with megatron-core {' and '.join(TESTED_VERSIONS)}, and "
            f"this is {version}. Before a long run, compare its numbers with `megatron-cp verify`.",
            stacklevel=2,
        )


@functools.cache
def install() -> Session:
    """Hook the features into Megatron once per process; return the session that did it."""
    session = Session(all_features())
    session.install()
    return session
