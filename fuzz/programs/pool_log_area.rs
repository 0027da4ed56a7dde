//! libFuzzer feeds `nacre_fuzz::pool_log_area`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::pool_log_area(data));
