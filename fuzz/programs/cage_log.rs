//! libFuzzer feeds `nacre_fuzz::cage_log`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::cage_log(data));
