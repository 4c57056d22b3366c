"""`python -m sglang.launch_server --model-path M --tp-size N --port P` of the small foreign server."""

import sys

if __name__ == "__main__":
    from foreign import arguments_of, serve

    serve("sglang", *arguments_of(sys.argv[1:]))
