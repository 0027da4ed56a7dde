//! Known answers of the primitives, and what boxes and messages refuse.

use proptest::prelude::*;

use super::*;

/// Decodes hexadecimal digits.
pub(super) fn hex(digits: &str) -> Vec<u8> {
    assert_eq!(digits.len() % 2, 0);
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
}

pub(crate) fn hex_of(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn key(bytes: &[u8]) -> SecretKey {
    SecretKey::take(&mut bytes.try_into().unwrap())
}

/// Random bytes that are always the same.
struct Constant(u8);

impl RandomBytes for Constant {
    fn fill(&self, buffer: &mut [u8]) -> Result<(), PoolError> {
        buffer.fill(self.0);
        Ok(())
    }
}

/// Random bytes that follow from a seed.
pub(super) struct Seeded(pub(super) std::sync::atomic::AtomicU64);

impl Seeded {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.into())
    }
}

impl RandomBytes for Seeded {
    fn fill(&self, buffer: &mut [u8]) -> Result<(), PoolError> {
        for part in buffer.chunks_mut(16) {
            let number = self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let bytes = crate::checksum::structure(&number.to_le_bytes());
            part.copy_from_slice(&bytes[..part.len()]);
        }
        Ok(())
    }
}

/// Key derivation of BLAKE3, from its test_vectors.json: the context string of the vectors, inputs 0, 1, 2, ... 250,
/// 0, ...
#[test]
fn derivation_is_that_of_blake3() {
    let vectors = [
        (0, "2cc39783c223154fea8dfb7c1b1660f2ac2dcbd1c1de8277b0b0dd39b7e50d7d"),
        (1, "b3e2e340a117a499c6cf2398a19ee0d29cca2bb7404c73063382693bf66cb06c"),
        (1023, "74a16c1c3d44368a86e1ca6df64be6a2f64cce8f09220787450722d85725dea5"),
    ];
    for (length, derived) in vectors {
        let input: Vec<u8> = (0..length).map(|at: usize| (at % 251) as u8).collect();
        let key = blake3::derive_key("BLAKE3 2019-12-27 16:29:52 test vectors context", &input);
        assert_eq!(hex_of(&key), derived);
    }
    // The keyed hash, of the same file.
    let elvish = key(b"whats the Elvish word for friend");
    let codes = [
        (0, "92b2b75604ed3c761f9d6f62392c8a9227ad0ea3f09573e783f1498a4ed60d26"),
        (1, "6d7878dfff2f485635d39013278ae14f1454b8c0a3a2d34bc1ab38228a80c95b"),
        (1024, "75c46f6f3d9eb4f55ecaaee480db732e6c2105546f1e675003687c31719c7ba4"),
    ];
    for (length, code) in codes {
        let input: Vec<u8> = (0..length).map(|at: usize| (at % 251) as u8).collect();
        let (one, other) = input.split_at(length / 3);
        assert_eq!(hex_of(mac(&elvish, &[one, other]).as_bytes()), code);
        assert_eq!(mac(&elvish, &[&input]), Mac::from_bytes(hex(code).try_into().unwrap()));
    }
}

#[test]
fn each_purpose_derives_a_key_of_its_own() {
    let parent = key(&[7; 32]);
    let mut seen = std::collections::BTreeSet::new();
    for (number, purpose) in KeyPurpose::ALL.into_iter().enumerate() {
        assert_eq!(purpose as usize, number);
        assert!(purpose.context().starts_with("nacre 2026-12 "), "{purpose:?}");
        let lengths: Vec<usize> =
            (0..=40).filter(|length| derive(purpose, parent.view(), &vec![3; *length]).is_ok()).collect();
        let [length] = lengths[..] else { panic!("{purpose:?} takes inputs of {lengths:?} bytes") };
        let input = vec![3; length];
        let derived = derive(purpose, parent.view(), &input).unwrap();
        // As BLAKE3 derives it from the whole context and input.
        let material = [parent.expose().as_slice(), &input].concat();
        assert_eq!(derived.expose(), &blake3::derive_key(purpose.context(), &material), "{purpose:?}");
        assert!(seen.insert((purpose.context(), *derived.expose())));
        let other = derive(purpose, key(&[8; 32]).view(), &input).unwrap();
        assert_ne!(derived.expose(), other.expose());
    }
    let keys: std::collections::BTreeSet<_> = seen.iter().map(|(_, key)| key).collect();
    assert_eq!(keys.len(), KeyPurpose::ALL.len());
}

#[test]
fn derived_keys_stay_as_they_are_in_the_format() {
    let parent = key(&[0x42; 32]);
    let pinned = |purpose, input: &[u8]| hex_of(derive(purpose, parent.view(), input).unwrap().expose());
    let id: Vec<u8> = (0..16).collect();
    let salt: Vec<u8> = (0..32).collect();
    let keys = [
        pinned(KeyPurpose::FrameAes, &id),
        pinned(KeyPurpose::FrameOwner, &id),
        pinned(KeyPurpose::BoxMaster, &salt),
        pinned(KeyPurpose::Seal, &[]),
    ];
    let format = [
        "34c382ee1d25d8bcf13667f82aa64ae4e29d5f15a73ebb2b8ba5bee7ba495dd1",
        "9d4bb958acb9f482b517977e12f46e791919821a669d932a830d32e7ebcfdb2d",
        "6c5af56f6eba1858ade814e23f4cbdde881a16b9ce4cc30cd2d8e552fdaa9eca",
        "27a428533bf4b3ca026b8478b1ae307d42cd196524ca219ae8ea2c8750a7d592",
    ];
    assert_eq!(keys, format);
}

#[test]
fn a_key_is_wiped_and_its_source_as_well() {
    let mut bytes = [9; 32];
    let mut key = SecretKey::take(&mut bytes);
    assert_eq!((bytes, key.expose()), ([0; 32], &[9; 32]));
    key.wipe();
    assert_eq!(key.expose(), &[0; 32]);
}

/// A message with its answer: key, nonce, associated data, plaintext, ciphertext, tag.
type Vector = (&'static str, &'static str, &'static str, &'static str, &'static str, &'static str);

/// AES-256-GCM: test cases 13, 14 and 16 of the GCM specification, then valid ones of Wycheproof's aes_gcm_test.json.
const AES: &[Vector] = &[
    (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "000000000000000000000000",
        "",
        "",
        "",
        "530f8afbc74536b9a963b4f1c4cb738b",
    ),
    (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "000000000000000000000000",
        "",
        "00000000000000000000000000000000",
        "cea7403d4d606b6e074ec5d3baf39d18",
        "d0d1c8a799996bf0265b98b5d48ab919",
    ),
    (
        "feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308",
        "cafebabefacedbaddecaf888",
        "feedfacedeadbeeffeedfacedeadbeefabaddad2",
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39",
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662",
        "76fc6ece0f4e1768cddf8853bb2d551b",
    ),
    (
        "cc56b680552eb75008f5484b4cb803fa5063ebd6eab91f6ab6aef4916a766273",
        "99e23ec48985bccdeeab60f1",
        "",
        "2a",
        "06",
        "633c1e9703ef744ffffb40edf9d14355",
    ),
    (
        "51e4bf2bad92b7aff1a4bc05550ba81df4b96fabf41c12c7b00e60e48db7e152",
        "4f07afedfdc3b6c2361823d3",
        "",
        "be3308f72a2c6aed",
        "cf332a12fdee800b",
        "602e8d7c4799d62c140c9bb834876b09",
    ),
    (
        "67119627bd988eda906219e08c0d0d779a07d208ce8a4fe0709af755eeec6dcb",
        "68ab7fdbf61901dad461d23c",
        "",
        "51f8c1f731ea14acdb210a6d973e07",
        "43fc101bff4b32bfadd3daf57a590e",
        "ec04aacb7148a8b8be44cb7eaf4efa69",
    ),
    (
        "59d4eafb4de0cfc7d3db99a8f54b15d7b39f0acc8da69763b019c1699f87674a",
        "2fcb1b38a99e71b84740ad9b",
        "",
        "549b365af913f3b081131ccb6b825588",
        "f58c16690122d75356907fd96b570fca",
        "28752c20153092818faba2a334640d6e",
    ),
    (
        "3b2458d8176e1621c0cc24c0c0e24c1e80d72f7ee9149a4b166176629616d011",
        "45aaa3e5d16d2d42dc03445d",
        "",
        "3ff1514b1c503915918f0c0c31094a6e1f",
        "73a6b6f45f6ccc5131e07f2caa1f2e2f56",
        "2d7379ec1db5952d4e95d30c340b1b1d",
    ),
    (
        "b279f57e19c8f53f2f963f5f2519fdb7c1779be2ca2b3ae8e1128b7d6c627fc4",
        "98bc2c7438d5cd7665d76f6e",
        "c0",
        "fcc515b294408c8645c9183e3f4ecee5127846d1",
        "eb5500e3825952866d911253f8de860c00831c81",
        "ecb660e1fb0541ec41e8d68a64141b3a",
    ),
    (
        "cdccfe3f46d782ef47df4e72f0c02d9c7f774def970d23486f11a57f54247f17",
        "376187894605a8d45e30de51",
        "956846a209e087ed",
        "e28e0e9f9d22463ac0e42639b530f42102fded75",
        "feca44952447015b5df1f456df8ca4bb4eee2ce2",
        "082e91924deeb77880e1b1c84f9b8d30",
    ),
    (
        "f32364b1d339d82e4f132d8f4a0ec1ff7e746517fa07ef1a7f422f4e25a48194",
        "5a86a50a0e8a179c734b996d",
        "ab2ac7c44c60bdf8228c7884adb20184",
        "43891bccb522b1e72a6b53cf31c074e9d6c2df8e",
        "43dda832e942e286da314daa99bef5071d9d2c78",
        "c3922583476ced575404ddb85dd8cd44",
    ),
    (
        "ff0089ee870a4a39f645b0a5da774f7a5911e9696fc9cad646452c2aa8595a12",
        "bc2a7757d0ce2d8b1f14ccd9",
        "972ab4e06390caae8f99dd6e2187be6c7ff2c08a24be16ef",
        "748b28031621d95ee61812b4b4f47d04c6fc2ff3",
        "a929ee7e67c7a2f91bbcec6389a3caf43ab49305",
        "ebec6774b955e789591c822dab739e12",
    ),
    (
        "6efca98126918ab564d88c6bec02e8998b2be50e3f906ff9adfdd185f373e756",
        "4abd6cfc83bd06b11efaa2a7",
        "",
        "bbec79c086d41e602d090f7e40494d6bf3faa1dc6df0ab8a88ea5d35d426b248c2ad880351e223f6170d37cc9655e10459e59cbd6d1c092ed31d72ccc7af20",
        "97b4c73a4d8b5b21bc4b50dbb70dfa77b1a7bf0bbe7cf16ecf5bb60ba8070acc5740780435ed145a62a613dd9881b721168fbb3f5af385ee5d4f856cf93cba",
        "27ac8c4010d8e81b7051ceb06b30fe2d",
    ),
];

/// ChaCha20-Poly1305: RFC 8439 2.8.2, then valid ones of Wycheproof's chacha20_poly1305_test.json.
const CHACHA: &[Vector] = &[
    (
        "808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9f",
        "070000004041424344454647",
        "50515253c0c1c2c3c4c5c6c7",
        "4c616469657320616e642047656e746c656d656e206f662074686520636c617373206f66202739393a204966204920636f756c64206f6666657220796f75206f6e6c79206f6e652074697020666f7220746865206675747572652c2073756e73637265656e20776f756c642062652069742e",
        "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b1a71de0a9e060b2905d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc3ff4def08e4b7a9de576d26586cec64b6116",
        "1ae10b594f09e26a7e902ecbd0600691",
    ),
    (
        "80ba3192c803ce965ea371d5ff073cf0f43b6a2ab576b208426e11409c09b9b0",
        "4da5bf8dfd5852c1ea12379d",
        "",
        "",
        "",
        "76acb342cf3166a5b63c0c0ea1383c8d",
    ),
    (
        "7a4cd759172e02eb204db2c3f5c746227df584fc1345196391dbb9577a250742",
        "a92ef0ac991dd516a3c6f689",
        "bd506764f2d2c410",
        "",
        "",
        "906fa6284b52f87b7359cbaa7563c709",
    ),
    (
        "cc56b680552eb75008f5484b4cb803fa5063ebd6eab91f6ab6aef4916a766273",
        "99e23ec48985bccdeeab60f1",
        "",
        "2a",
        "3a",
        "cac27dec0968801e9f6eded69d807522",
    ),
    (
        "46f0254965f769d52bdb4a70b443199f8ef207520d1220c55e4b70f0fda620ee",
        "ab0dca716ee051d2782f4403",
        "91ca6c592cbcca53",
        "51",
        "c4",
        "168310ca45b1f7c66cad4e99e43f72b9",
    ),
    (
        "2f7f7e4f592bb389194989743507bf3ee9cbde1786b6695fe6c025fd9ba4c100",
        "461af122e9f2e0347e03f2db",
        "",
        "5c60",
        "4d13",
        "91e8b61efb39c122195453077b22e5e2",
    ),
    (
        "c8833dce5ea9f248aa2030eacfe72bffe69a620caf793344e5718fe0d7ab1a58",
        "61546ba5f1720590b6040ac6",
        "88364fc8060518bf",
        "ddf2",
        "b60d",
        "ead0fd4697ec2e5558237719d02437a2",
    ),
    (
        "2eb168e53b07ab04355ea792fe11a6be2ce9c39cfe15a997076b1e38c17ad620",
        "b5965470c383fd29fe7eaee7",
        "6d52feb2509f7fbf",
        "6fdf2927e169",
        "41abff7b71cc",
        "9b5174297c03cf8902d1f706fd008902",
    ),
    (
        "1131c1418577a054de7a4ac551950f1a053f9ae46e5b75fe4abd5608d7cddadd",
        "b4ea666ee119563366484a78",
        "66c0ae70076cb14d",
        "a4c9c2801b71f7df",
        "b9b910433af052b0",
        "4530f51aeee024e0a445a6328fa67a18",
    ),
    (
        "841020d1606edcfc536abfb1a638a7b958e21efc10c386ac45a18493450afd5f",
        "6d62f159731b140eb18ce074",
        "5a8e1c7aa39810d5",
        "d6af138f701b801e60c85ffd5c",
        "b0a7500aca45bb15f01ece4389",
        "0160e83adbec7f6a2ee2ff0215f9ef00",
    ),
    (
        "e6f1118d41e4b43fb58221b7ed79673834e0d8ac5c4fa60bbc8bc4893a58894d",
        "d95b3243afaef714c5035b6a",
        "6453a53384632212",
        "97469da667d6110f9cbda1d1a20673",
        "32db66c4a3819d81557455e5980fed",
        "feae30dec94e6ad3a9eea06a0d703917",
    ),
];

/// Bits of a tag that Wycheproof's invalid vectors ("Flipped bit N in tag") have flipped, alone and in pairs.
const FLIPPED: &[&[usize]] =
    &[&[0], &[1], &[7], &[8], &[31], &[32], &[33], &[63], &[64], &[71], &[77], &[96], &[127], &[0, 64], &[31, 63]];

#[test]
fn messages_are_sealed_as_the_standards_require() {
    for (cipher, vectors) in [(Cipher::Aes256Gcm, AES), (Cipher::ChaCha20Poly1305, CHACHA)] {
        for (secret, nonce, associated, plain, sealed, tag) in vectors {
            let (key, associated, nonce) = (key(&hex(secret)), hex(associated), hex(nonce).try_into().unwrap());
            let mut body = hex(plain);
            let made = seal_message(cipher, &key, nonce, &associated, &mut body).unwrap();
            assert_eq!((hex_of(&body).as_str(), hex_of(&made).as_str()), (*sealed, *tag), "{cipher:?}, key {secret}");
            open_message(cipher, &key, nonce, &associated, &mut body, made).unwrap();
            assert_eq!(hex_of(&body), *plain);
            for bits in FLIPPED {
                let (mut wrong, mut body) = (made, hex(sealed));
                bits.iter().for_each(|bit| wrong[bit / 8] ^= 1 << (bit % 8));
                assert_eq!(open_message(cipher, &key, nonce, &associated, &mut body, wrong), Err(WrongSeal));
                assert!(body.iter().all(|byte| *byte == 0), "nothing of the plaintext is left");
            }
        }
    }
}

/// AES-256-GCM and ChaCha20-Poly1305: tags of all zeros and all ones are not accepted for a message that has another.
#[test]
fn trivial_tags_are_refused() {
    for cipher in [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305] {
        for tag in [[0; TAG], [0xff; TAG]] {
            let mut body = vec![5; 40];
            assert_eq!(open_message(cipher, &key(&[1; 32]), [0; NONCE], b"", &mut body, tag), Err(WrongSeal));
        }
    }
}

#[test]
fn ciphers_have_fixed_numbers() {
    assert_eq!(Cipher::try_from(Cipher::Aes256Gcm as u8).unwrap(), Cipher::Aes256Gcm);
    assert_eq!(Cipher::try_from(Cipher::ChaCha20Poly1305 as u8).unwrap(), Cipher::ChaCha20Poly1305);
    assert_eq!((Cipher::Aes256Gcm as u8, Cipher::ChaCha20Poly1305 as u8), (1, 2));
    assert!(Cipher::try_from(0).is_err() && Cipher::try_from(3).is_err());
    let fast = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let has_aes = fast.split_whitespace().any(|flag| flag == "aes");
    assert_eq!(Cipher::preferred() == Cipher::Aes256Gcm, has_aes);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_flipped_bit_of_a_message_is_found(
        body in proptest::collection::vec(any::<u8>(), 0..80),
        associated in proptest::collection::vec(any::<u8>(), 0..24),
        secret: [u8; 32], nonce: [u8; NONCE], is_aes: bool,
    ) {
        let cipher = if is_aes { Cipher::Aes256Gcm } else { Cipher::ChaCha20Poly1305 };
        let mut sealed = body.clone();
        let tag = seal_message(cipher, &key(&secret), nonce, &associated, &mut sealed).unwrap();
        let parts: [&[u8]; 5] = [&sealed, &tag, &nonce, &associated, &secret];
        let bits: usize = parts.iter().map(|part| part.len() * 8).sum();
        for bit in 0..bits {
            let mut changed = parts.map(<[u8]>::to_vec);
            let mut left = bit;
            for part in &mut changed {
                if left < part.len() * 8 {
                    part[left / 8] ^= 1 << (left % 8);
                    break;
                }
                left -= part.len() * 8;
            }
            let [mut sealed, tag, nonce, associated, secret] = changed;
            let (tag, nonce) = (tag.try_into().unwrap(), nonce.try_into().unwrap());
            prop_assert_eq!(open_message(cipher, &key(&secret), nonce, &associated, &mut sealed, tag), Err(WrongSeal));
            prop_assert!(sealed.iter().all(|byte| *byte == 0));
        }
        open_message(cipher, &key(&secret), nonce, &associated, &mut sealed, tag).unwrap();
        prop_assert_eq!(sealed, body);
    }
}

#[test]
fn boxes_open_with_their_key_and_fields_alone() {
    let (parent, random) = (key(&[1; 32]), Seeded::new(1));
    let fields: [&[u8]; 3] = [b"root", b"", b"7"];
    let secret = b"a secret of some bytes";
    let sealed = seal_box(&random, KeyPurpose::BoxMaster, parent.view(), &fields, secret).unwrap();
    assert_eq!(sealed.len(), secret.len() + BOX_OVERHEAD);
    assert!(!sealed.windows(6).any(|part| part == &secret[..6]));
    let open = |purpose, parent: &SecretKey, fields: &[&[u8]], sealed: &[u8]| {
        open_box(purpose, parent.view(), fields, sealed).map(|secret| secret.to_vec())
    };
    assert_eq!(open(KeyPurpose::BoxMaster, &parent, &fields, &sealed).unwrap(), secret);
    assert_eq!(open(KeyPurpose::BoxSlot, &parent, &fields, &sealed), Err(WrongSeal));
    assert_eq!(open(KeyPurpose::Seal, &parent, &fields, &sealed), Err(WrongSeal), "not a purpose of boxes");
    assert_eq!(open(KeyPurpose::BoxMaster, &key(&[2; 32]), &fields, &sealed), Err(WrongSeal));
    let others: [&[&[u8]]; 5] = [
        &[b"root", b"", b"8"],
        &[b"", b"root", b"7"],
        &[b"root", b"7", b""],
        &[b"root7", b"", b""],
        &[b"root", b"", b"7", b""],
    ];
    for fields in others {
        assert_eq!(open(KeyPurpose::BoxMaster, &parent, fields, &sealed), Err(WrongSeal));
    }
    for length in 0..sealed.len() {
        assert_eq!(open(KeyPurpose::BoxMaster, &parent, &fields, &sealed[..length]), Err(WrongSeal));
        let mut changed = sealed.clone();
        changed[length] ^= 1;
        assert_eq!(open(KeyPurpose::BoxMaster, &parent, &fields, &changed), Err(WrongSeal));
    }
    assert!(seal_box(&random, KeyPurpose::FrameAes, parent.view(), &fields, secret).is_err(), "a purpose of frames");
}

#[test]
fn salts_differ_for_different_secrets_under_equal_random_bytes() {
    let parent = key(&[1; 32]);
    let seal = |random: u8, parent: &SecretKey, secret: &[u8]| {
        seal_box(&Constant(random), KeyPurpose::BoxSlot, parent.view(), &[], secret).unwrap()
    };
    let (one, other) = (seal(0, &parent, b"one"), seal(0, &parent, b"two"));
    assert_ne!(one[..32], other[..32]);
    assert_ne!(one[..32], seal(1, &parent, b"one")[..32]);
    assert_ne!(one[..32], seal(0, &key(&[2; 32]), b"one")[..32]);
    assert_eq!(one, seal(0, &parent, b"one"));
}

#[test]
fn salts_differ_for_different_fields_under_equal_random_bytes() {
    let parent = key(&[1; 32]);
    let salt = |purpose, fields: &[&[u8]], secret: &[u8]| {
        seal_box(&Constant(0), purpose, parent.view(), fields, secret).unwrap()[..32].to_vec()
    };
    let salts: std::collections::BTreeSet<_> = [
        salt(KeyPurpose::BoxSlot, &[b"a"], b"one"),
        salt(KeyPurpose::BoxSlot, &[b"b"], b"one"),
        salt(KeyPurpose::BoxSlot, &[], b"one"),
        salt(KeyPurpose::BoxSlot, &[b"a", b""], b"one"),
        salt(KeyPurpose::BoxMaster, &[b"a"], b"one"),
    ]
    .into();
    assert_eq!(salts.len(), 5);
    assert!(salts.contains(&salt(KeyPurpose::BoxSlot, &[b"a"], b"one")));
}

#[test]
fn the_kernel_gives_other_bytes_each_time() {
    let random = SystemRandom::default();
    let (mut one, mut other) = ([0; 32], [0; 32]);
    random.fill(&mut one).unwrap();
    random.fill(&mut other).unwrap();
    assert_ne!(one, other);
}
