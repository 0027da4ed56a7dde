//! Binary content in git's form: compressed, in base 85, forwards and backwards.

use miniz_oxide::deflate::compress_to_vec_zlib;

const DIGITS: &[u8; 85] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~";
/// Bytes in a line.
const LINE: usize = 52;
const LEVEL: u8 = 6;

/// The change from one content to the other, and back.
pub(super) fn both(old: &[u8], new: &[u8]) -> Vec<u8> {
    let mut text = b"GIT binary patch\n".to_vec();
    literal(new, &mut text);
    literal(old, &mut text);
    text
}

fn literal(content: &[u8], text: &mut Vec<u8>) {
    text.extend(format!("literal {}\n", content.len()).bytes());
    for line in compress_to_vec_zlib(content, LEVEL).chunks(LINE) {
        // Letters for 1 to 52: upper case, then lower case.
        let length = u8::try_from(line.len()).unwrap_or_default();
        text.push(if length <= 26 { b'A' + length - 1 } else { b'a' + length - 27 });
        for group in line.chunks(4) {
            let mut bytes = [0; 4];
            for (to, from) in bytes.iter_mut().zip(group) {
                *to = *from;
            }
            text.extend(base85(u32::from_be_bytes(bytes)));
        }
        text.push(b'\n');
    }
    text.push(b'\n');
}

fn base85(mut number: u32) -> [u8; 5] {
    let mut digits = [0; 5];
    for digit in digits.iter_mut().rev() {
        let value = usize::try_from(number % 85).unwrap_or_default();
        *digit = DIGITS.get(value).copied().unwrap_or_default();
        number /= 85;
    }
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_those_of_git() {
        assert_eq!(&base85(0), b"00000");
        assert_eq!(&base85(u32::MAX), b"|NsC0");
    }
}
