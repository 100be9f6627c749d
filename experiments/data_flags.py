"""Which data a command looks at: a run's, a gin file's, or a file of records named directly."""

from __future__ import annotations

import dataclasses

from absl import flags

from bluelm_jax import data_config, layout, run_config, schemes, serialize
from bluelm_jax.data import tokenizer as tokenizers
from experiments import gin_setup as gin_setup
from gin_configs import command

UNBOUNDED = 2**31 - 1

RUN = flags.DEFINE_string("run", None, "Directory of a run.")
DATA_JSON = flags.DEFINE_string(
    "data_json", None, "LLaVA records, JSON or JSON lines, instead of a run or gin file."
)
IMAGE_ROOT = flags.DEFINE_string(
    "image_root", "", "Folder that the images of --data_json are relative to; default: its own."
)
TEMPLATE = flags.DEFINE_string("template", "bluelm", "Conversation template, with --data_json.")
TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "tokenizer.json or SentencePiece .model, with --data_json; default: bytes."
)
BOS = flags.DEFINE_string("bos", "<s>", "Token of --tokenizer that opens a sequence; '' for none.")
EOS = flags.DEFINE_string("eos", "</s>", "Token of --tokenizer that ends a turn; '' for none.")
TILING = flags.DEFINE_enum(
    "tiling", "relaxed_384_3x3_a0.1", list(schemes.PRESETS), "Tiling preset, with --data_json."
)
SEQ_LEN = flags.DEFINE_integer(
    "seq_len", 0, "Positions of a row, with --data_json; 0: any.", lower_bound=0
)
TILES = flags.DEFINE_integer(
    "tiles_per_group", 0, "Tiles of a group, with --data_json; 0: any.", lower_bound=0
)
_DIRECT = ("image_root", "template", "tokenizer", "bos", "eos", "tiling", "seq_len",
           "tiles_per_group")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Data to look at, and tokens along one side of a view."""

    data: data_config.DataConfig
    side: layout.Side


def chosen() -> Chosen:
    """What the flags name.

    Raises:
      ValueError: they name nothing or two things, or the tokenizer does not fit the model.
    """
    if DATA_JSON.value:
        if RUN.value or command.GIN_FILE.value or command.GIN_BINDINGS.value:
            raise ValueError("--data_json stands alone; leave --run and the gin flags out")
        return _direct(DATA_JSON.value)
    stray = [f"--{name}" for name in _DIRECT if flags.FLAGS[name].present]
    if stray:
        raise ValueError(f"{', '.join(stray)} only with --data_json; bind the config's own fields")
    run = configured_run(RUN.value)
    tokenizers.check_fits(tokenizers.load(run.data.tokenizer), run.model.decoder.vocab_size)
    return Chosen(run.data, run.token_side)


def configured_run(directory: str | None) -> run_config.RunConfig:
    """The run of --run=DIRECTORY, or else of --gin_file and --gin_bindings (`RunConfig.data`, ...)."""
    if directory is not None:
        if command.GIN_FILE.value or command.GIN_BINDINGS.value:
            raise ValueError("--run takes the run's own config; leave the gin flags out")
        return serialize.load_run_config(directory)
    if not (command.GIN_FILE.value or command.GIN_BINDINGS.value):
        raise ValueError("name the data: --run, --gin_file or --data_json")
    return command.build(run_config.RunConfig)


def _direct(path: str) -> Chosen:
    tiling = schemes.PRESETS[TILING.value]
    source = data_config.SourceConfig(path=path, image_root=IMAGE_ROOT.value)
    data = data_config.DataConfig(
        sources=(source,),
        template=TEMPLATE.value,
        tokenizer=_tokenizer(),
        tiling=tiling,
        seq_len=SEQ_LEN.value or UNBOUNDED,
        batch_size=2,
        tiles_per_group=TILES.value or UNBOUNDED,
        packing=data_config.Packing(),
        shuffle=False,
        epochs=1,
        drop_remainder=False,
    )
    return Chosen(data, layout.view_side(tiling.tile_size))


def _tokenizer() -> data_config.TokenizerChoice:
    if TOKENIZER.value is None:
        return data_config.ByteTokens()
    if TOKENIZER.value.endswith(".model"):
        return data_config.SentencePieceFile(path=TOKENIZER.value)
    return data_config.TokenizerFile(
        path=TOKENIZER.value, bos=BOS.value or None, eos=EOS.value or None
    )
