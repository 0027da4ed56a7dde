//! libFuzzer feeds `nacre_fuzz::send_stream`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::send_stream(data));
