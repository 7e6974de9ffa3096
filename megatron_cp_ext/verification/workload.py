"""The training that every run of a verification repeats: model, batch, data, optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Eight heads in four groups split over Ulysses at 4 and over TP 2; two layers over PP 2.
TINY_GPT = (
    *("--num-layers", "2", "--hidden-size", "128", "--ffn-hidden-size", "256"),
    *("--num-attention-heads", "8", "--group-query-attention", "--num-query-groups", "4"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
)

# The rate is constant, so that a run's first steps do not depend on how many follow, and a resumed
# training may have another number of them than the checkpoint was written for.
ADAM = (
    *("--optimizer", "adam", "--lr", "1e-3", "--min-lr", "1e-3", "--lr-decay-style", "constant"),
    *("--lr-warmup-iters", "0", "--override-opt-param-scheduler"),
    *("--weight-decay", "0.01", "--clip-grad", "1.0"),
)

# 256 byte values and the end-of-document token.
BYTE_TOKENS = (
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "257"),
    *("--make-vocab-size-divisible-by", "8"),
)


@dataclass(frozen=True)
class Workload:
    """One training, apart from how it is spread over ranks.

    Args:
        steps: number of optimizer steps, counted from the first step of a fresh training.
        seq_length: tokens of a sequence.
        dtype: `fp32` or `bf16`, of weights and activations.
        micro_batch_size: sequences in one forward pass of one data-parallel rank.
        global_batch_size: sequences of an optimizer step, over all data-parallel ranks.
        seed: of the initial weights and of the order of the data.
        data_prefix: `PREFIX` of an indexed dataset `PREFIX.bin`, `PREFIX.idx` of byte-level
            tokens; None for Megatron's mock data, which count upwards and are soon learnt.
        script: a training script to run; None for the packaged GPT pre-training.
        model: Megatron's arguments for the model.
        extra: further Megatron arguments; they come last and win.
    """

    steps: int = 20
    seq_length: int = 256
    dtype: Literal["fp32", "bf16"] = "fp32"
    micro_batch_size: int = 1
    global_batch_size: int = 4
    seed: int = 1234
    data_prefix: Path | None = None
    script: Path | None = None
    model: tuple[str, ...] = TINY_GPT
    extra: tuple[str, ...] = ()

    def arguments(self, data_cache: Path) -> list[str]:
        """Megatron's command line arguments.

        Args:
            data_cache: folder for the dataset's index files.
        """
        if self.data_prefix is None:
            data = ["--mock-data"]
        else:
            data = ["--data-path", str(self.data_prefix), "--data-cache-path", str(data_cache)]
        return [
            *self.model,
            *("--seq-length", str(self.seq_length)),
            *("--max-position-embeddings", str(self.seq_length)),
            *("--micro-batch-size", str(self.micro_batch_size)),
            *("--global-batch-size", str(self.global_batch_size)),
            *("--train-iters", str(self.steps), "--seed", str(self.seed)),
            *ADAM,
            *(["--bf16"] if self.dtype == "bf16" else []),
            *BYTE_TOKENS,
            *data,
            *("--split", "100,0,0", "--eval-iters", "0", "--eval-interval", "1000000"),
            *("--num-workers", "0", "--log-interval", "1"),
            *self.extra,
        ]
