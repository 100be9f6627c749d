"""From a data config to an endless or finite stream of batches that resumes exactly.

Which sample stands at which place of the stream is a pure function of place, seed and config
(grain's shuffle, repeat and mix have random access), and making an example depends on nothing else.
So the whole state of the stream is the next place, plus the places of the samples that wait for
room in a batch: a few integers, valid for any number of workers. Places are read and prepared ahead
by grain, in threads or worker processes, one result for each place; what a policy leaves out comes
back as a reason, is counted, and the next place moves up.

Hosts share one global order: host p of n takes every n-th place, from place p. With finite epochs
and policies that drop samples, hosts may have different numbers of batches.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain

from bluelm_jax.data import batching, conversation, mixture
from bluelm_jax.data import measure as measuring
from bluelm_jax.data import tokenizer as tokenizers
from bluelm_jax.data.counters import Counters
from bluelm_jax.data.examples import Example, ExampleMaker, Skipped
from bluelm_jax.data.host_states import Host
from bluelm_jax.data.iterator import BatchIterator
from bluelm_jax.data.opening import fingerprint, open_records
from bluelm_jax.data.plans import Planner
from bluelm_jax.data.prepare import Prepare
from bluelm_jax.data.sources import InvalidRecordError, Records, sample_name
from bluelm_jax.data_config import DataConfig, Packing, SourceConfig
from bluelm_jax.layout import Side


class Pipeline:
    """A config's data: iterate over it for batches.

    Args:
      config: the data config; `batch_size` counts the rows of this host.
      side: tokens along one side of a view, or unordered ones (`layout.token_side`).
      tokenizer: None loads the config's.
      records: overrides the files of `config.sources`, one `Records` for each.
      process_index, process_count: this host among all.

    Raises:
      ValueError: there is no source, a file is missing or empty, or a needed token is not in the
        tokenizer.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        side: Side,
        tokenizer: tokenizers.Tokenizer | None = None,
        records: Sequence[Records] | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ):
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index = {process_index}: must be in 0..{process_count - 1}")
        if not config.sources:
            raise ValueError("DataConfig.sources = (): must name at least one file")
        self.config = config
        self.planner = Planner(config, side=side, tokenizer=tokenizer)
        self.maker = ExampleMaker(self.planner)
        self.records = tuple(records or (open_records(s, config.seed) for s in config.sources))
        for source, each in zip(config.sources, self.records, strict=True):
            if len(each) == 0:
                raise ValueError(f"{source.path}: the file holds no record")
        self.shape = batching.BatchShape.of(config, side=side, pad_id=self.tokenizer.pad_id)
        self._host = Host(process_index, process_count)
        self._prepare = Prepare(self.maker, self.records, config)

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer in use."""
        return self.planner.tokenizer

    def order(self) -> grain.MapDataset:
        """(source, record) of every place of this host's stream."""
        return self.shared_order()[self._host.rank :: self._host.total]

    def shared_order(self) -> grain.MapDataset:
        """(source, record) of every place of the order that all hosts share."""
        return mixture.order(self.config, self._counts())

    def _counts(self) -> list[int]:
        return [len(records) for records in self.records]

    def order_id(self) -> str:
        """Changes whenever `shared_order` does; a state is only valid for the order it is from.

        Behind a '_' stands a fingerprint of the records (`opening.fingerprint`).
        """
        config = self.config
        sources = [
            (len(r), s.weight, *_selection(s))
            for r, s in zip(self.records, config.sources, strict=True)
        ]
        what = (sources, config.shuffle, config.seed, config.epochs)
        found = [fingerprint(records) for records in self.records]
        order, records = (hashlib.sha256(repr(x).encode()).hexdigest()[:16] for x in (what, found))
        return f"{order}_{records}"

    def examples(self) -> grain.MapDataset:
        """The prepared outcome of every place of the order that hosts share, by random access."""
        return self.shared_order().map(self._prepare)

    def __iter__(self) -> BatchIterator:
        return BatchIterator(
            self.examples(),
            self.shape,
            self.config,
            self.order_id(),
            sum(self._counts()),
            self._any_used,
            mixture.period(self.config, self._counts()),
            self._host,
        )

    def _any_used(self) -> bool:
        """Whether the policies leave any record of any source; reads up to the first such one."""
        keys = ((i, k) for i, count in enumerate(self._counts()) for k in range(count))
        return any("skipped" not in self._prepare(key) for key in keys)

    def prompts(
        self,
        source: int = 0,
        *,
        turn: int = -1,
        counters: Counters | None = None,
        answered: bool = False,
        new_tokens: int = 0,
    ) -> Iterator[Example]:
        """Every record of a source as a prompt with its reference answer, in file order.

        What a policy leaves out is passed over; `counters` counts and names it, and what a policy
        changed. `answered` and `new_tokens` are those of `ExampleMaker.make_prompt`. A record with
        answers, but without number `turn` among them, is invalid.
        """
        config, records = self.config.sources[source], self.records[source]
        make = functools.partial(
            self._make_prompt, turn=turn, answered=answered, new_tokens=new_tokens
        )
        for i in range(len(records)):
            made = self.maker.of_record(make, records, i, config)
            skipped = isinstance(made, Skipped)
            events = ((made.reason, made.detail),) if skipped else made.events
            if counters is not None:
                for reason, detail in events:
                    counters.add(reason, detail)
            if not skipped:
                yield made

    def _make_prompt(
        self, record: Mapping[str, Any], source: SourceConfig, where: str, turn: int, **options: Any
    ) -> Example | Skipped:
        name = sample_name(record, where)
        turns, _ = conversation.read_turns(record, name)
        answers = sum(each.speaker == conversation.ASSISTANT for each in turns)
        if answers and not -answers <= turn < answers:
            raise InvalidRecordError(f"{name}: no answer number {turn}, it has {answers}")
        return self.maker.make_prompt(record, source, where, turn=turn, **options)

    def measure(
        self, num_batches: int | None = None, *, prompts: bool = False
    ) -> measuring.Measurement:
        """Sizes that the first `num_batches` batches need, from image headers alone.

        Assumes one sample a row and no sample dropped for its length or number of tiles; the bounds
        in the config play no part. With the same seed, every tiling sees the same samples in the
        same batches, so the results are exact for a controlled comparison. An endless stream
        shuffles each epoch anew, so give as many batches as the run has steps; finite epochs may
        give None for all of them. With `prompts`, the sizes are those of what stands before each
        sample's last answer, as `prompts(answered=True)` has it.

        Raises:
          ValueError: `num_batches` is None and the stream is endless, or the policies leave no
            sample.
          InvalidRecordError, UnreadableImageError: unless the policy deals with them.
        """
        order = self.order()
        if num_batches is None:
            if self.config.epochs is None:
                raise ValueError("measure(num_batches=None) needs finite epochs")
            num_batches = -(-len(order) // self.config.batch_size)
        period = mixture.period(self.config, self._counts())
        found = measuring.measure(order, self.records, self.maker, num_batches, prompts, period)
        if found.max_length == 0:
            files = ", ".join(source.path for source in self.config.sources)
            raise ValueError(f"no sample of {files} is left by the policies; see validate_data")
        return found

    def measure_packing(self, num_samples: int = 4096) -> measuring.Fill:
        """Tiles a group that suit this host's first samples when packed, and the fill with them.

        From image headers alone; the config's `tiles_per_group` plays no part. Rows, `seq_len`,
        groups and the rule of packing are the config's; without one, `Packing()`.

        Raises:
          InvalidRecordError, UnreadableImageError: unless the policy deals with them.
        """
        period = mixture.period(self.config, self._counts())
        sizes = measuring.packed_sizes(self.order(), self.records, self.maker, num_samples, period)
        rule = self.config.packing or Packing()
        shape = dataclasses.replace(self.shape, max_samples_per_row=rule.max_samples_per_row)
        return measuring.choose_tiles(sizes, shape, rule)


def _selection(source: SourceConfig) -> tuple:
    """What else decides a source's order; nothing where no such field is set."""
    chosen = (source.repeat, source.first, source.random)
    return () if chosen == (None, None, None) else chosen
