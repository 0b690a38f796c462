"""Token orders: in which order the cells of a grid become the tokens of a sequence."""

from dilkit.orders.token_order import TokenOrder as TokenOrder
from dilkit.orders.token_order import order as order
