"""How the next token is chosen, as a frozen config. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
import numbers

from bluelm_jax.checks import check

_COUNTS = ("max_new_tokens", "min_new_tokens", "top_k", "prefill_chunk")
# Logits are divided by the temperature: far below this, float32 overflows and the draw is of NaN.
_LEAST_TEMPERATURE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are chosen.

    Attributes:
      max_new_tokens: tokens generated at most, the stop token included.
      min_new_tokens: tokens before which no stop token is chosen.
      temperature: 0 is greedy; else at least 1e-6.
      top_k: keep the k most likely tokens and those that tie with the k-th; 0 keeps all.
      top_p: keep the smallest set of tokens whose probability reaches p.
      repetition_penalty: divides the positive logits of tokens that the prompt or the answer holds
        already, and multiplies the negative ones (CTRL, Keskar et al. 2019, sec. 4.1); 1 leaves
        them. Image positions hold no token and do not count.
      prefill_chunk: prompt positions a call of the decoder (the phone uses 128); 0 takes all.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    prefill_chunk: int = 0

    def __post_init__(self):
        for field in _COUNTS:
            value = getattr(self, field)
            whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            check(self, field, whole, "an integer")
            object.__setattr__(self, field, int(value))  # NumPy's integers too.
        check(self, "max_new_tokens", self.max_new_tokens > 0, "> 0")
        at_most = f"in 0..{self.max_new_tokens}, max_new_tokens"
        check(self, "min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, at_most)
        usable = self.temperature == 0 or _LEAST_TEMPERATURE <= self.temperature < math.inf
        check(self, "temperature", usable, f"0, or finite and >= {_LEAST_TEMPERATURE}")
        check(self, "top_k", self.top_k >= 0, ">= 0")
        check(self, "top_p", 0 < self.top_p <= 1, "in (0, 1]")
        check(self, "repetition_penalty", 0 < self.repetition_penalty < math.inf, "> 0")
        check(self, "prefill_chunk", self.prefill_chunk >= 0, ">= 0")
