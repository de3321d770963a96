"""What changefeeds replicate from: the sources by the scheme of their URIs, and TiKV's change feed as one of them."""
