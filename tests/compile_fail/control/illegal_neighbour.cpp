// expect: error: .*this_is_not_a_name
// complaint: FAILED: the legal neighbour .-DLEGAL. does not compile
int main() { return this_is_not_a_name; }
