"""How annotations are checked while the tests run; `conftest.py` installs it for the library."""

from beartype import BeartypeConf, beartype

# An int is fine where a float is asked for, as PEP 484 has it.
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function):
    """Checks arguments and result of each call, except of constructors.

    A config's constructor turns bad values down itself, with the better message, and takes lists
    where it stores tuples. A pytree's constructor must take whatever JAX puts in place of arrays:
    shardings, shapes, placeholders.
    """
    return function if function.__name__ == "__init__" else _check(function)
