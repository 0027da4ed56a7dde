//! libFuzzer feeds `nacre_fuzz::sizes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::sizes(data));
