"""The one-call form: torch.utils.cpp_extension's arguments, opkiln's cache."""

import opkiln

counter = opkiln.load_inline(
    "popcount",
    """
    extern "C" int count_ones(unsigned long long word) { return __builtin_popcountll(word); }
    """,
    is_python_module=False,
    abi="none",  # no torch in it: a plain shared library, and a compile of a tenth of a second
)
assert counter.count_ones(0b1011) == 3
print("0b1011 has", counter.count_ones(0b1011), "ones")
