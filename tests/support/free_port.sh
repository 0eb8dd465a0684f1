# free_port: prints a TCP port that no process listens on and that no other test was given. A rank listens seconds after its test has
# chosen the port, so tests that run at once count through one file. The ports lie below those that the system hands out (32768) and
# below 29500, the default of torchrun.
free_port() {
  (
    last=/tmp/chevron-test-port.$(id -u)
    exec 9>> "$last"
    flock 9
    number=$(cat "$last")
    case $number in
      '' | *[!0-9]*) number=$((20000 + $(od -An -N2 -tu2 /dev/urandom) % 9500)) ;;
    esac
    while :; do
      number=$((20000 + (number - 19999) % 9500))
      grep -q ":$(printf %04X $number) " /proc/net/tcp /proc/net/tcp6 2> /dev/null || break
    done
    echo "$number" > "$last"
    echo "$number"
  )
}
