"""The sources of changefeeds by the scheme of the source URI; each is a puller with its dump."""
