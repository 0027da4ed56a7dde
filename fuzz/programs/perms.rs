//! libFuzzer feeds `nacre_fuzz::perms`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::perms(data));
