"""`vllm serve MODEL --tensor-parallel-size N --port P` of the small foreign server."""

import sys

if __name__ == "__main__":
    from foreign import arguments_of, serve

    serve("vllm", *arguments_of(sys.argv[2:]))
