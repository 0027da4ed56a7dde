//! libFuzzer feeds `nacre_fuzz::acl`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::acl(data));
