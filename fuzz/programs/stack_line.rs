//! libFuzzer feeds `nacre_fuzz::stack_line`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::stack_line(data));
