//! libFuzzer feeds `nacre_fuzz::key_rows`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::key_rows(data));
