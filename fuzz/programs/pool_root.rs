//! libFuzzer feeds `nacre_fuzz::pool_root`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::pool_root(data));
