"""Pictures of patterns and of token orders, drawn into a matplotlib figure (`pip install 'dilkit[plot]'`), and as text."""

from dilkit.viz.counts import count_text as count_text, draw_count as draw_count
from dilkit.viz.orders import draw_orders as draw_orders
