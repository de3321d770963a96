"""The capture daemon: changefeeds, their pullers, sorter and sink manager, and what steers them."""
