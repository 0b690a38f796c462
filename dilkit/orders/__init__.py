"""Token orders: permutations that put the cells of a grid into a sequence."""

from dilkit.orders.token_order import TokenOrder as TokenOrder, order as order
