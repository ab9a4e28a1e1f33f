namespace pagemill {
const char *native_version() { return "0.1.0"; }
}  // namespace pagemill
