//! libFuzzer feeds `nacre_fuzz::sealed_node`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::sealed_node(data));
