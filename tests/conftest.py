"""What every test runs under: eight CPU devices, strict shapes, checked annotations.

This has to happen before anything imports `bluelm_jax` or touches a JAX device, so it stands at
module level. Child processes inherit the environment variables only: a data worker or a command
started by a test runs the library as a user would, without the annotation checks.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # TensorFlow's notes on devices it does not find.
# Eight devices meet in collectives, several at a time, and each waiting one holds a thread of XLA's
# pool. With a pool of eight, the default on a small machine, all of them can wait for a ninth.
os.environ["NPROC"] = "32"
# Nearly all of the suite's time is compiling; tiny shapes gain nothing from optimised code.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax
from hypothesis import settings
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every run, and no deadline on a shared machine. Nothing is stored.
settings.register_profile("repository", derandomize=True, deadline=None, database=None)
settings.load_profile("repository")

# Every annotated function of the library is checked when it is called. Never uninstalled.
install_import_hook("bluelm_jax", "annotation_checks.check")
