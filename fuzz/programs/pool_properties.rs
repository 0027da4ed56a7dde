//! libFuzzer feeds `nacre_fuzz::pool_properties`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::pool_properties(data));
