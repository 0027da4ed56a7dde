//! libFuzzer feeds `nacre_fuzz::pool_names`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::pool_names(data));
