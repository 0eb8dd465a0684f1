# free_port: prints a TCP port that no process listens on and that no other test was given. A rank listens seconds after its test has
# chosen the port, so tests that run at once count through one file. The ports lie below those that the system hands out (32768) and
# below 29500, the default of torchrun; above 20000, from which job numbers of Slurm are counted.
free_port() {
  (
    last=/tmp/chevron-test-port.$(id -u)
    exec 9>> "$last"
    flock 9
    number=$(cat "$last")
    case $number in
      '' | *[!0-9]*) number=$((20001 + $(od -An -N2 -tu2 /dev/urandom) % 9400)) ;;
    esac
    while :; do
      number=$((20001 + (number - 20000) % 9400))
      grep -q ":$(printf %04X $number) " /proc/net/tcp /proc/net/tcp6 2> /dev/null || break
    done
    echo "$number" > "$last"
    echo "$number"
  )
}
