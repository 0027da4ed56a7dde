//! libFuzzer feeds `nacre_fuzz::union_marks`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nacre_fuzz::union_marks(data));
