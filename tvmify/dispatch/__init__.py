"""The path of a call, from its signature to an executor. Begin with `dispatcher`."""
