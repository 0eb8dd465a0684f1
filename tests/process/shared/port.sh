# free_port: a port on which no process listens, below the ports that the system hands out.
free_port() {
  while :; do
    number=$((20000 + $(od -An -N2 -tu2 /dev/urandom) % 12000))
    if ! grep -q ":$(printf %04X $number) " /proc/net/tcp /proc/net/tcp6 2> /dev/null; then
      echo $number
      return
    fi
  done
}
