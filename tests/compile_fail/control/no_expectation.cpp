// complaint: FAILED: .* has no line '// expect: <regex>'
int main() { return this_is_not_a_name; }
