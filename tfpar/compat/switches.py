"""Switches of DTensor in the environment, set before its first function is compiled: importing this file sets them."""

import os

# DTensor merges all-reduces by default and may then move an optimizer's read of a slot before its write: momentum SGD, Adam
# and others train wrongly without an error.
os.environ["DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"] = "0"

# An axis that moves from one dim of a tensor to another does so by an all-to-all by default, which on CPU puts shards in
# wrong places where both dims follow the first and the tensor has four dims or more. Without it: a gather and a slice.
os.environ["DTENSOR_USE_ALL_TO_ALL_RELAYOUT"] = "0"

# DTensor carries layouts from operation to operation in at most so many rounds, 500 by default, three times over. A model
# that is deeper, its gradients included, fails with "missing layout for result".
os.environ.setdefault("DTENSOR_LAYOUT_PROPAGATION_MAX_STEPS", "5000")
