"""The web console: static pages, and the answers that carry them. It knows no daemon."""
