"""python -m chevron_pipelining.build: compiles the binding, as the first import does, and prints the binary's path."""
from chevron_pipelining import compiler

if __name__ == "__main__":
    print(compiler.binary())
