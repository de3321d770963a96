"""A directory in memory, as `lake.files.Files`."""


class MemoryFiles:
    """A directory; `lost` creations are made, but their answer is that there was a file already,
    as after a retry.
    """

    def __init__(self):
        self.found = {}
        self.lost = 0

    def names(self):
        return sorted(self.found)

    def read(self, name):
        if name not in self.found:
            raise FileNotFoundError(name)
        return self.found[name]

    def create(self, name, text):
        if name in self.found:
            return False
        self.found[name] = text
        self.lost -= 1
        return self.lost != 0

    def remove(self, names):
        for name in names:
            self.found.pop(name, None)
