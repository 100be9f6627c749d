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

import hashlib
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from bluelm_jax.data import batching
from bluelm_jax.data import measure as measuring
from bluelm_jax.data import tokenizer as tokenizers
from bluelm_jax.data.examples import Example, ExampleMaker
from bluelm_jax.data.iterator import BatchIterator
from bluelm_jax.data.plans import Planner
from bluelm_jax.data.prepare import Key, Prepare
from bluelm_jax.data.sources import FileRecords, Records
from bluelm_jax.data_config import DataConfig


class Pipeline:
    """A config's data: iterate over it for batches.

    Args:
      config: the data config; `batch_size` counts the rows of this host.
      side: tokens along one side of a view.
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
        side: int,
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
        self.records = tuple(records or (FileRecords(s.path, s.index_dir) for s in config.sources))
        for source, each in zip(config.sources, self.records, strict=True):
            if len(each) == 0:
                raise ValueError(f"{source.path}: the file holds no record")
        self.shape = batching.BatchShape.of(config, side=side, pad_id=self.tokenizer.pad_id)
        self._shard = slice(process_index, None, process_count)
        self._prepare = Prepare(self.maker, self.records, config)

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer in use."""
        return self.planner.tokenizer

    def order(self) -> grain.MapDataset:
        """(source, record) of every place of this host's stream."""
        config = self.config
        streams = []
        for i, each in enumerate(self.records):
            stream = grain.MapDataset.range(len(each)).map(Key(i))
            if config.shuffle:
                seed = np.random.SeedSequence([config.seed, i]).generate_state(1)[0]
                stream = stream.shuffle(seed=int(seed))
            streams.append(stream.repeat(config.epochs))
        if len(streams) > 1:
            weights = [source.weight for source in config.sources]
            return grain.MapDataset.mix(streams, weights)[self._shard]
        return streams[0][self._shard]

    def order_id(self) -> str:
        """Changes whenever `order` does; a state is only valid for the order it was taken from."""
        config = self.config
        sources = [(len(r), s.weight) for r, s in zip(self.records, config.sources, strict=True)]
        shard = (self._shard.start, self._shard.step)
        what = (sources, config.shuffle, config.seed, config.epochs, shard)
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]

    def examples(self) -> grain.MapDataset:
        """The prepared outcome of every place of this host's stream, by random access."""
        return self.order().map(self._prepare)

    def __iter__(self) -> BatchIterator:
        total = sum(map(len, self.records))
        return BatchIterator(self.examples(), self.shape, self.config, self.order_id(), total)

    def prompts(self, source: int = 0, *, turn: int = -1) -> Iterator[Example]:
        """Every record of a source as a prompt with its reference answer, in file order.

        What a policy leaves out is passed over.
        """
        config = self.config.sources[source]
        records = self.records[source]
        for i in range(len(records)):
            made = self.maker.make_prompt(records[i], config, records.where(i), turn=turn)
            if isinstance(made, Example):
                yield made

    def measure(self, num_batches: int | None = None) -> measuring.Measurement:
        """Sizes that the first `num_batches` batches need, from image headers alone.

        Assumes one sample a row and no sample dropped for its length or number of tiles; the bounds
        in the config play no part. With the same seed, every tiling sees the same samples in the
        same batches, so the results are exact for a controlled comparison. An endless stream
        shuffles each epoch anew, so give as many batches as the run has steps; finite epochs may
        give None for all of them.

        Raises:
          ValueError: `num_batches` is None and the stream is endless.
          InvalidRecordError, UnreadableImageError: unless the policy deals with them.
        """
        order = self.order()
        if num_batches is None:
            if self.config.epochs is None:
                raise ValueError("measure(num_batches=None) needs finite epochs")
            num_batches = -(-len(order) // self.config.batch_size)
        return measuring.measure(order, self.records, self.maker, num_batches)
