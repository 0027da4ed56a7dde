//! libFuzzer feeds `nacre_fuzz::pool_tree`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::pool_tree(data));
