//! libFuzzer feeds `nacre_fuzz::stack_toml`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::stack_toml(data));
